"""Offline: answers files of requests and rows of Ray Data, by a service or by a model in this process"""

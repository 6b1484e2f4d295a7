"""Tests of engines of others."""

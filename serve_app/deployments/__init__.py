"""Deployments: what Ray Serve holds, and how calls cross from a router to a replica. Decides nothing."""

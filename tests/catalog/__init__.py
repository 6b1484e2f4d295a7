"""Tests of serve_app.catalog."""

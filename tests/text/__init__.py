"""Tests of serve_app.text."""

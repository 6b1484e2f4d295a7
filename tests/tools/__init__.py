"""Tests of serve_app.tools."""

"""serve_app: distributed, multi-model, multi-tenant text completion on Ray Serve."""

"""Observability: rules and dashboards for Prometheus and Grafana, request traces, and the format of log lines."""

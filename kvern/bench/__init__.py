"""Benchmarks that come with the package: `kvern bench ...`."""

"""Fuzzer: seeded, generated and damaged inputs to everything that parses external data."""

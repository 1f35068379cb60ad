"""A load generator for any OpenAI-compatible server. Speaks HTTP only, imports no other package."""

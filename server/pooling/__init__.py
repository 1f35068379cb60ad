"""Vectors instead of texts: embeddings, and what is judged by them or by a head that scores."""

"""Pooling endpoints: embeddings, and scores by embeddings or by a classification head."""

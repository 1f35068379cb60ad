"""From logits to tokens: a function of each row's logits, parameters, seed and position."""

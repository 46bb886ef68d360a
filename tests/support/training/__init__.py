"""Small models to train."""

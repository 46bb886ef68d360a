"""What `train.py` measures: models, and the ways of training them."""

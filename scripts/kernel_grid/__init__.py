"""The grid of `check_backends.py`: every variant over the calls that it claims, against fp64 softmax attention."""

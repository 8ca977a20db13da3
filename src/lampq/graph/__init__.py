"""What is in the model."""

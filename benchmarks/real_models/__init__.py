"""What a person would do with two public models."""

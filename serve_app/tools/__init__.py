"""Tool calls in a model's text: the forms that families write them in, read as they come."""

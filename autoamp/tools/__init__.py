"""What is asked of a model beside running it: bench, compare, export, ..."""

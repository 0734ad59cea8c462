"""What is asked of a model beside running it: bench, budget, export, ..."""

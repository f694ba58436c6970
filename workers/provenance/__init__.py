"""What made a number: the code that measures, the machine, the libraries."""

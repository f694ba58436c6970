"""Files that other tools load, made of what runs measured; one file of code for each format."""

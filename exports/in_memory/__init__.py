"""What the format `iceberg` needs while it is made. It is a folder of its own because importing it
needs pyiceberg, and the registry imports every file of `exports`.
"""

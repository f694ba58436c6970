"""The explorer: queries of a page, the engine that answers them, and the server between them."""

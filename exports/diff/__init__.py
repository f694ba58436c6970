"""`headcount diff`: what is said of two models, and the page that shows both."""

"""Pure functions behind the callbacks: what a model is made of, what is drawn, what it takes."""

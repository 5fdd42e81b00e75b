"""Commands that make a model or checkpoint of another form."""

"""The Linen ops, the table of all ops, and how calls of models are traced."""

"""IR to IR rewrites: one file per pass, the pipeline as one literal list."""

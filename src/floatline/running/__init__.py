"""A script as it is, under a plan: what `floatline run` does, and what trials and validations of scripts stand on."""

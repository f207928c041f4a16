"""Other frameworks and services: each module needs a package of its own, and the core imports none of them."""

"""What is trained side by side: arms over seeds, what is kept of them, and where they stop."""

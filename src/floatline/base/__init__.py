"""What every room may use: files, numbers as JSON, texts, lazily offered names, and private names of other packages."""

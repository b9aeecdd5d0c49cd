"""What is known of a failure, and how it is shown."""

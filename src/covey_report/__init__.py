"""What a run's folder shows to people: a page for the browser, text, pictures, and files for other tools."""

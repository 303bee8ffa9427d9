"""Plans and running jobs, drawn for people: terminal, HTML, SVG."""

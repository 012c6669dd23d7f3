"""The paper's tables and figures as commands: what each number is, what makes it, and both side by side."""

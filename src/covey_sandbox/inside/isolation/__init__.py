"""What a program is shut in by: namespaces, landlock, system call filters, users, and the checks of them."""

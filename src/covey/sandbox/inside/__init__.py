"""What runs in processes of its own: judge, zygote, program. Standard library only, nothing of covey outside here."""

"""How fast and how safe what judges answers is: programs, machines, turns and slow tools."""

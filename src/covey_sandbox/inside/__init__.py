"""Judge, zygote and program processes; they import the standard library alone."""

"""Does the doctor name what is wrong, and nothing where nothing is?"""

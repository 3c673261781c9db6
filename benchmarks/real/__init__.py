"""Real pretrained models: made into folders, trained by the recipes for a laptop, shown before and after."""

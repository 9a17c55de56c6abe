"""Where the bodies of stored answers are; what to keep is the inventory's business."""

"""Detection and instance segmentation with Swin backbones."""

"""A group of devices that hold one model together, each rank a part of the bytes."""

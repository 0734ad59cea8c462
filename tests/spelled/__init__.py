"""Layers as libraries write them, on hostile data, held to the accuracy law."""

"""Dynamo, asked to compile for one model: the frames it meets, leaves and fails on."""

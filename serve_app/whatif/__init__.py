"""What-if: simulates traffic with the code of router and scheduler on a virtual clock; nothing is computed"""

"""lampq"""

"""The store on PostgreSQL, through SQLAlchemy and the driver pg8000. `dialect` puts the parts together."""

\set postgres `cat /run/secrets/postgresql/postgres`
\set airflow `cat /run/secrets/postgresql/airflow`
\set mlflow `cat /run/secrets/postgresql/mlflow`
\set controller `cat /run/secrets/postgresql/controller`
SELECT format('CREATE ROLE %I LOGIN', role)
  FROM (VALUES ('airflow'), ('mlflow'), ('hermes_controller')) AS wanted (role)
  WHERE NOT EXISTS (SELECT FROM pg_roles WHERE rolname = role) \gexec
ALTER ROLE postgres PASSWORD :'postgres';
ALTER ROLE airflow PASSWORD :'airflow';
ALTER ROLE mlflow PASSWORD :'mlflow';
ALTER ROLE hermes_controller PASSWORD :'controller';
SELECT format('CREATE DATABASE %I OWNER %I', role, role)
  FROM (VALUES ('airflow'), ('mlflow')) AS wanted (role)
  WHERE NOT EXISTS (SELECT FROM pg_database WHERE datname = role) \gexec
REVOKE ALL ON DATABASE airflow, mlflow, postgres, template1 FROM PUBLIC;
GRANT CONNECT ON DATABASE airflow TO hermes_controller;

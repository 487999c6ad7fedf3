//! Reading the tables.

use std::path::Path;

use serde_json::Value;

/// One table: a kind, and rows of named columns.
pub(crate) struct Table {
    pub(crate) kind: String,
    pub(crate) meta: Value,
    columns: Vec<String>,
    rows: Vec<Vec<Value>>,
}

impl Table {
    pub(crate) fn read(path: &Path) -> Result<Self, String> {
        let at = |error: &dyn std::fmt::Display| format!("{}: {error}", path.display());
        let text = std::fs::read_to_string(path).map_err(|error| at(&error))?;
        let mut json: Value = serde_json::from_str(&text).map_err(|error| at(&error))?;
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        let columns = serde_json::from_value(json["columns"].take()).map_err(|error| at(&error))?;
        let rows: Vec<Vec<Value>> = serde_json::from_value(json["rows"].take()).map_err(|error| at(&error))?;
        if rows.is_empty() {
            return Err(at(&"no rows"));
        }
        Ok(Self {
            kind: name.split('.').next().unwrap_or_default().to_owned(),
            meta: json["meta"].take(),
            columns,
            rows,
        })
    }

    pub(crate) fn len(&self) -> usize {
        self.rows.len()
    }

    pub(crate) fn rows(&self) -> impl Iterator<Item = Row<'_>> {
        self.rows.iter().map(|values| Row { columns: &self.columns, values })
    }
}

/// One row. The accessors panic, naming the column, if it is not there or holds something else: then the table is broken.
#[derive(Clone, Copy)]
pub(crate) struct Row<'a> {
    columns: &'a [String],
    values: &'a [Value],
}

impl<'a> Row<'a> {
    pub(crate) fn has(&self, column: &str) -> bool {
        self.columns.iter().any(|name| name == column)
    }

    pub(crate) fn value(&self, column: &str) -> &'a Value {
        let at = self.columns.iter().position(|name| name == column);
        at.and_then(|at| self.values.get(at)).unwrap_or_else(|| panic!("no column `{column}` in {self}"))
    }

    /// Anything that serde can read, `Option`s for null included.
    pub(crate) fn get<T: serde::de::DeserializeOwned>(&self, column: &str) -> T {
        serde_json::from_value(self.value(column).clone())
            .unwrap_or_else(|error| panic!("column `{column}` of {self}: {error}"))
    }

    pub(crate) fn usize(&self, column: &str) -> usize {
        self.get(column)
    }

    pub(crate) fn bool(&self, column: &str) -> bool {
        self.get(column)
    }

    pub(crate) fn text(&self, column: &str) -> &'a str {
        self.value(column).as_str().unwrap_or_else(|| panic!("column `{column}` of {self} is no text"))
    }

    /// A name of one of the crate's enumerations.
    pub(crate) fn parse<T: std::str::FromStr<Err = latentwave::Error>>(&self, column: &str) -> T {
        self.text(column).parse().unwrap_or_else(|error| panic!("column `{column}` of {self}: {error}"))
    }

    /// As [`Row::parse`], for a column that may be null.
    pub(crate) fn parse_opt<T: std::str::FromStr<Err = latentwave::Error>>(&self, column: &str) -> Option<T> {
        (!self.value(column).is_null()).then(|| self.parse(column))
    }
}

impl std::fmt::Display for Row<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}", serde_json::to_string(self.values).unwrap_or_default())
    }
}

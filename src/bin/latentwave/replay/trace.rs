//! Request traces: when each request came, how long its prompt is, how many tokens were generated.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use latentwave::{Error, Result};

/// Longest prompt or answer that a trace may hold, in tokens; beyond it the file is broken.
const MOST_TOKENS: usize = 1 << 24;

/// One request of a trace.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Request {
    /// Seconds since the first request.
    pub(crate) arrival: f64,
    /// Tokens of the prompt, at least 1.
    pub(crate) context: usize,
    /// Tokens generated, at least 1. The first comes from the prompt's own pass.
    pub(crate) generated: usize,
}

impl Request {
    /// Tokens that the cache holds at most for it, when `spec_tokens` drafts go with every decode step.
    ///
    /// The last generated token is never cached, and drafts need room even where they are refused.
    pub(crate) fn peak_tokens(&self, spec_tokens: usize) -> usize {
        match self.generated {
            0 | 1 => self.context,
            generated => self.context + generated - 1 + spec_tokens,
        }
    }
}

/// Reads a trace file.
///
/// # Errors
/// [`Error::Io`]; as [`parse`].
pub(crate) fn read(path: &Path) -> Result<Vec<Request>> {
    let file = File::open(path).map_err(|source| Error::Io { path: path.to_owned(), source })?;
    parse(file, &path.display().to_string())
}

/// Parses a trace: CSV with a header that names `TIMESTAMP`, `ContextTokens` and `GeneratedTokens` (in any order, among others),
/// one request per line. Lines may end in LF or CR LF. Requests are returned by time of arrival.
///
/// # Errors
/// [`Error::Parse`] naming the line and the column.
pub(crate) fn parse(text: impl Read, name: &str) -> Result<Vec<Request>> {
    let error = |place: String, problem: String| Error::Parse { what: name.to_owned(), place, problem };
    let mut reader = csv::ReaderBuilder::new().trim(csv::Trim::All).from_reader(text);
    let header = reader.headers().map_err(|e| error("line 1".into(), e.to_string()))?.clone();
    let column = |wanted: &str| {
        header.iter().position(|found| found.eq_ignore_ascii_case(wanted)).ok_or_else(|| {
            let found: Vec<_> = header.iter().collect();
            error("line 1".into(), format!("no column `{wanted}` among {found:?}"))
        })
    };
    let columns = [column("TIMESTAMP")?, column("ContextTokens")?, column("GeneratedTokens")?];

    let mut requests = Vec::new();
    let mut record = csv::StringRecord::new();
    loop {
        match reader.read_record(&mut record) {
            Ok(true) => {}
            Ok(false) => break,
            Err(e) => {
                let line = e.position().map_or(requests.len() as u64 + 2, line_of);
                let problem = match e.kind() {
                    csv::ErrorKind::UnequalLengths { expected_len, len, .. } => {
                        format!("{len} fields, the header has {expected_len}; is the line whole?")
                    }
                    _ => e.to_string(),
                };
                return Err(error(format!("line {line}"), problem));
            }
        }
        let line = record.position().map_or(0, line_of);
        let field = |i: usize| record.get(columns[i]).unwrap_or_default();
        let tokens = |i: usize| match field(i).parse::<usize>() {
            Ok(tokens) if (1..=MOST_TOKENS).contains(&tokens) => Ok(tokens),
            _ => Err(error(
                format!("line {line}, column `{}`", &header[columns[i]]),
                format!("`{}`: a whole number from 1 to {MOST_TOKENS} was expected", field(i)),
            )),
        };
        let arrival = seconds(field(0)).ok_or_else(|| {
            error(
                format!("line {line}, column `{}`", &header[columns[0]]),
                format!("`{}`: `YYYY-MM-DD hh:mm:ss.fraction` or seconds were expected", field(0)),
            )
        })?;
        requests.push(Request { arrival, context: tokens(1)?, generated: tokens(2)? });
    }
    if requests.is_empty() {
        return Err(error("line 2".into(), "no request; is the file whole?".into()));
    }

    requests.sort_by(|a, b| a.arrival.total_cmp(&b.arrival));
    let first = requests[0].arrival;
    for request in &mut requests {
        request.arrival -= first;
    }
    Ok(requests)
}

/// The line that a record stands on. (The reader's own count of lines lags by one where they end in CR LF.)
fn line_of(position: &csv::Position) -> u64 {
    position.record() + 1
}

/// Seconds of a timestamp: `YYYY-MM-DD hh:mm:ss.fraction` counted from 1970, or a plain number.
fn seconds(text: &str) -> Option<f64> {
    if let Ok(seconds) = text.parse::<f64>() {
        return seconds.is_finite().then_some(seconds);
    }
    let (date, time) = text.split_once([' ', 'T'])?;
    let part = |text: Option<&str>, range: std::ops::RangeInclusive<i64>| {
        text?.parse::<i64>().ok().filter(|number| range.contains(number))
    };
    let mut date = date.splitn(3, '-');
    let (year, month, day) = (part(date.next(), 0..=9999)?, part(date.next(), 1..=12)?, part(date.next(), 1..=31)?);
    let mut time = time.trim_end_matches('Z').splitn(3, ':');
    let (hour, minute) = (part(time.next(), 0..=23)?, part(time.next(), 0..=59)?);
    let second = time.next()?.parse::<f64>().ok().filter(|second| (0.0..61.0).contains(second))?;

    // Days since 1970 in the Gregorian calendar, with years that begin in March.
    let (year, month) = if month > 2 { (year, month - 3) } else { (year - 1, month + 9) };
    let days =
        365 * year + year.div_euclid(4) - year.div_euclid(100) + year.div_euclid(400) + (153 * month + 2) / 5 + day;
    Some((((days - 719_469) * 24 + hour) * 60 + minute) as f64 * 60.0 + second)
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEADER: &str = "TIMESTAMP,ContextTokens,GeneratedTokens";

    fn parse_error(text: &str) -> (String, String) {
        match parse(text.as_bytes(), "t.csv") {
            Err(Error::Parse { what, place, problem }) => {
                assert_eq!(what, "t.csv");
                (place, problem)
            }
            other => panic!("a parse error was expected, got {other:?}"),
        }
    }

    #[test]
    fn both_line_ends_and_a_last_line_without() {
        let rows = ["2023-11-16 18:15:46.6805900,374,44", "2023-11-16 18:15:50.9951690,396,109"];
        for end in ["\n", "\r\n"] {
            for last in ["", end] {
                let text = format!("{HEADER}{end}{}{end}{}{last}", rows[0], rows[1]);
                let requests = parse(text.as_bytes(), "t.csv").unwrap();
                assert_eq!((requests[0].context, requests[0].generated, requests[0].arrival), (374, 44, 0.0));
                assert_eq!((requests[1].context, requests[1].generated), (396, 109));
                assert!((requests[1].arrival - 4.314_579).abs() < 1e-6, "{}", requests[1].arrival);
            }
        }
    }

    #[test]
    fn columns_in_any_order_and_rows_by_arrival() {
        let text = "GeneratedTokens, contexttokens ,Id,Timestamp\n7,9,x,12.5\n3,4,y,2.5\n";
        let requests = parse(text.as_bytes(), "t.csv").unwrap();
        assert_eq!(requests[0], Request { arrival: 0.0, context: 4, generated: 3 });
        assert_eq!(requests[1], Request { arrival: 10.0, context: 9, generated: 7 });
    }

    #[test]
    fn timestamps() {
        assert_eq!(seconds("1970-01-01 00:00:00"), Some(0.0));
        assert_eq!(seconds("2000-03-01T00:00:01.5Z"), Some(951_868_801.5));
        assert_eq!(seconds("2023-12-31 23:59:59").map(|s| s + 1.0), seconds("2024-01-01 00:00:00"));
        assert_eq!(seconds("2024-02-29 00:00:00").map(|s| s + 86_400.0), seconds("2024-03-01 00:00:00"));
        for bad in ["", "today", "2023-13-01 00:00:00", "2023-01-01", "2023-01-01 25:00:00", "NaN", "2023-01-01 00:00"]
        {
            assert_eq!(seconds(bad), None, "{bad}");
        }
    }

    #[test]
    fn malformed_files_name_the_line_and_the_column() {
        assert!(parse_error("").1.contains("no column `TIMESTAMP`"));
        assert!(parse_error("TIMESTAMP,ContextTokens\n1,2\n").1.contains("no column `GeneratedTokens`"));
        assert_eq!(parse_error(&format!("{HEADER}\r\n")).0, "line 2");
        let (place, problem) = parse_error(&format!("{HEADER}\r\n1.0,5,6\r\n2.0,5"));
        assert!(place == "line 3" && problem.contains("2 fields"), "{place}: {problem}");
        let (place, problem) = parse_error(&format!("{HEADER}\n1.0,5,6,7\n"));
        assert!(place == "line 2" && problem.contains("4 fields"), "{place}: {problem}");
        for bad in ["0", "-3", "1.5", "many", "", "99999999999999999999"] {
            let (place, problem) = parse_error(&format!("{HEADER}\n1.0,5,6\n1.0,{bad},6\n"));
            assert_eq!(place, "line 3, column `ContextTokens`");
            assert!(problem.starts_with(&format!("`{bad}`")), "{problem}");
        }
        assert_eq!(parse_error(&format!("{HEADER}\n1.0,5,0\n")).0, "line 2, column `GeneratedTokens`");
        assert_eq!(parse_error(&format!("{HEADER}\nnoon,5,6\n")).0, "line 2, column `TIMESTAMP`");
        assert!(matches!(
            parse(&b"TIMESTAMP,ContextTokens,GeneratedTokens\n1.0,\xff\xfe,3\n"[..], "t"),
            Err(Error::Parse { .. })
        ));
    }

    #[test]
    fn a_missing_file_is_an_io_error() {
        assert!(matches!(read(Path::new("no/such/trace.csv")), Err(Error::Io { .. })));
    }

    #[test]
    fn peaks() {
        let request = |context, generated| Request { arrival: 0.0, context, generated };
        assert_eq!(request(10, 1).peak_tokens(3), 10);
        assert_eq!(request(10, 2).peak_tokens(0), 11);
        assert_eq!(request(10, 2).peak_tokens(3), 14);
    }
}

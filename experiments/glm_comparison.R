# Tables of R packages, and the fits of R; called by glm_comparison.py.
#
#   Rscript glm_comparison.R table FILE PACKAGE DATA PREPARE FORMULA
#   Rscript glm_comparison.R TOOL FILE FAMILY FORMULA SPLIT...
#
# The first writes a table as csv, with the two columns that say which rows and which clients a split holds out. The second
# fits a tool to the splits ("rows 1" to "clients 5") and prints one line for each: the split, the seconds of the fit, its
# dispersion, a note, and the predictions of the held-out rows, separated by tabs.
suppressPackageStartupMessages(library(lme4))
arguments <- commandArgs(trailingOnly = TRUE)
SPLITS <- 5
SEED <- 31

write_table <- function(file, package, name, prepare, formula) {
  found <- new.env()
  suppressWarnings(data(list = name, package = package, envir = found))
  data <- as.data.frame(if (exists(name, found)) get(name, found) else getExportedValue(package, name))
  data <- eval(parse(text = prepare), data, list2env(list(data = data)))
  columns <- all.vars(as.formula(formula)) # the target first, the client last
  data <- data[complete.cases(data[columns]), columns]
  client <- paste0("c", as.character(data[[length(columns)]]))
  plain <- lapply(columns[-length(columns)], function(column) {
    values <- data[[column]]
    if (column == columns[1]) return(as.numeric(values))
    if (is.numeric(values)) return(signif(as.numeric(scale(values)), 10)) # no tool then depends on units
    values <- as.character(values)
    if (anyNA(suppressWarnings(as.numeric(values)))) values else paste0(column, values)
  })
  data <- setNames(data.frame(plain, client, stringsAsFactors = FALSE), columns)
  set.seed(SEED)
  # the rows of every client are dealt to the splits; a client with one row keeps it
  data$row_split <- ave(seq_along(client), client, FUN = function(rows) {
    if (length(rows) == 1) 0 else (rank(runif(length(rows))) + sample(SPLITS, 1)) %% SPLITS + 1
  })
  clients <- sort(unique(client), method = "radix")
  data$client_split <- (sample(length(clients)) %% SPLITS + 1)[match(client, clients)]
  write.csv(data, file, row.names = FALSE)
}

links <- list(
  gaussian = gaussian(), binomial = binomial(), poisson = poisson(), `negative binomial` = poisson(),
  gamma = Gamma("log")
)
processor_seconds <- function() sum(proc.time()[c("user.self", "sys.self")])

# Means of new clients: the inverse link averaged over the normal distribution of what random effects add to each row.
new_means <- function(eta, covariance, test) {
  if (link$family == "gaussian") return(eta)
  design <- model.matrix(as.formula(paste("~", deparse(bar[[2]]))), test)[, rownames(covariance), drop = FALSE]
  spread <- sqrt(rowSums((design %*% covariance) * design))
  rowMeans(sapply(qnorm(ppoints(200)), function(score) link$linkinv(eta + score * spread)))
}

fit_lme4 <- function(train, test, new) {
  fit <- switch(family,
    gaussian = lmer(formula, train),
    `negative binomial` = glmer.nb(formula, train),
    glmer(formula, train, family = link)
  )
  done <- processor_seconds()
  known <- function() predict(fit, test, type = "response")
  mean <- if (new) new_means(predict(fit, test, re.form = NA), VarCorr(fit)[[1]], test) else known()
  dispersion <- switch(family,
    gaussian = sigma(fit),
    gamma = 1 / sigma(fit)^2,
    `negative binomial` = getME(fit, "glmer.nb.theta")
  )
  list(done = done, mean = mean, dispersion = dispersion, note = paste(fit@optinfo$conv$lme4$messages, collapse = "; "))
}

fit_glmmTMB <- function(train, test, new) {
  fit <- glmmTMB::glmmTMB(formula, train, family = if (family == "negative binomial") glmmTMB::nbinom2() else link)
  done <- processor_seconds()
  eta <- function() predict(fit, test, type = "link", re.form = NA, allow.new.levels = TRUE)
  mean <- if (new) new_means(eta(), glmmTMB::VarCorr(fit)$cond[[1]], test) else predict(fit, test, type = "response")
  dispersion <- switch(family,
    gamma = 1 / sigma(fit)^2,
    sigma(fit)
  )
  converged <- fit$fit$convergence == 0 && isTRUE(fit$sdr$pdHess)
  list(done = done, mean = mean, dispersion = dispersion, note = if (converged) "" else "not converged")
}

# Latent classes: the number of classes with the smallest BIC; predictions are weighted by each client's posterior.
fit_flexmix <- function(train, test, new) {
  if (family == "gamma") stop("no Gamma family with the log link")
  target <- if (family == "binomial") paste0("cbind(", all.vars(formula)[1], ", 1 - ", all.vars(formula)[1], ")") else all.vars(formula)[1]
  text <- paste(target, "~", paste(deparse(fixed[[3]]), collapse = ""), "|", client)
  driver <- flexmix::FLXMRglm(family = link$family)
  set.seed(1)
  found <- flexmix::stepFlexmix(as.formula(text), data = train, model = driver, k = 1:4, nrep = 3, verbose = FALSE)
  fit <- if (is(found, "stepFlexmix")) flexmix::getModel(found, "BIC") else found
  done <- processor_seconds()
  shares <- flexmix::posterior(fit)
  weights <- shares[match(test[[client]], train[[client]]), , drop = FALSE]
  weights[is.na(weights[, 1]), ] <- rep(flexmix::prior(fit), each = sum(is.na(weights[, 1])))
  each <- sapply(flexmix::predict(fit, newdata = test), function(mean) mean[, 1])
  list(done = done, mean = rowSums(each * weights), note = if (fit@converged) "" else "not converged")
}

fit_pooled <- function(train, test, new) {
  fit <- if (family == "negative binomial") MASS::glm.nb(fixed, train) else glm(fixed, link, train)
  done <- processor_seconds()
  dispersion <- switch(family,
    gaussian = sigma(fit),
    gamma = 1 / summary(fit)$dispersion,
    `negative binomial` = fit$theta
  )
  list(done = done, mean = predict(fit, test, type = "response"), dispersion = dispersion)
}

# A GLM for every client: its own rows, and up to 500 rows of all clients with the weight of one row altogether.
fit_own <- function(train, test, new) {
  if (new) stop("a model per client says nothing of new clients")
  quasi <- switch(link$family,
    binomial = quasibinomial(),
    poisson = quasipoisson(),
    link
  )
  set.seed(1)
  others <- train[sample(nrow(train), min(nrow(train), 500)), ]
  mean <- numeric(nrow(test))
  for (one in unique(test[[client]])) {
    own <- train[train[[client]] == one, ]
    both <- rbind(own, others)
    both$weight_of_row <- rep(c(1, 1 / nrow(others)), c(nrow(own), nrow(others)))
    of_client <- test[[client]] == one
    mean[of_client] <- predict(glm(fixed, quasi, both, weights = weight_of_row), test[of_client, ], type = "response")
  }
  list(done = processor_seconds(), mean = mean)
}

fit_split <- function(split) {
  part <- strsplit(split, " ")[[1]]
  held <- data[[if (part[1] == "rows") "row_split" else "client_split"]] == as.integer(part[2])
  notes <- character()
  found <- tryCatch(
    withCallingHandlers(
      {
        start <- processor_seconds()
        result <- tools[[arguments[1]]](data[!held, ], data[held, ], part[1] == "clients")
        if (!all(is.finite(result$mean))) stop("predictions are not finite")
        c(result, seconds = result$done - start)
      },
      warning = function(w) invokeRestart("muffleWarning"),
      message = function(m) invokeRestart("muffleMessage")
    ),
    error = function(e) list(note = paste("error:", conditionMessage(e)))
  )
  number <- function(value) if (is.null(value)) "" else paste(signif(value, 10), collapse = " ")
  note <- gsub("\\s+", " ", paste0("", found$note))
  cat(split, number(found$seconds), number(found$dispersion), note, number(found$mean), sep = "\t")
  cat("\n")
}

if (arguments[1] == "table") {
  do.call(write_table, as.list(arguments[-1]))
} else {
  tools <- list(lme4 = fit_lme4, glmmTMB = fit_glmmTMB, flexmix = fit_flexmix, pooled = fit_pooled, own = fit_own)
  data <- read.csv(arguments[2], stringsAsFactors = TRUE)
  family <- arguments[3]
  link <- links[[family]]
  formula <- as.formula(arguments[4])
  fixed <- nobars(formula)
  bar <- findbars(formula)[[1]]
  client <- as.character(bar[[3]])
  data[[client]] <- as.character(data[[client]])
  if (arguments[1] == "flexmix") suppressPackageStartupMessages(library(flexmix))
  for (split in arguments[-(1:4)]) fit_split(split)
}
